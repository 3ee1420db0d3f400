"""The worker's side of the protocol: how it joins, and its channel to the servers."""
