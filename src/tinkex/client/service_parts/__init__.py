"""Parts of ServiceClient, one subject per module."""
