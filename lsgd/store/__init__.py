"""Stores: copies of a run's files at a URL (S3, other clouds, SFTP, a shared folder), by fsspec."""
