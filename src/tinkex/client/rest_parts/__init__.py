"""Parts of RestClient and AdminClient, one subject per module."""
