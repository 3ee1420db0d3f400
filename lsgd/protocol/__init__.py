"""What servers and workers say to each other: messages, sockets, keys. No torch."""
