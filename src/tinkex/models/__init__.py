"""Models that ship with the package, and the verifiable task they are taught."""
