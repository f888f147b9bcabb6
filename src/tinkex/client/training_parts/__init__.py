"""Parts of TrainingClient, one subject per module."""
