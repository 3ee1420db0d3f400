"""A worker's part of the data: of maps, streams, samplers of the script, and Trainers' loaders."""
