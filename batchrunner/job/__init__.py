"""TODO job."""
