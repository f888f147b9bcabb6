"""Parts of SamplingClient, one subject per module."""
