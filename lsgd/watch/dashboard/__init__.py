"""The page of a run: its data as JSON, the server that shows it live, and the report that is one file."""
