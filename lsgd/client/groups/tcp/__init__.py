"""Groups over TCP connections of their own: one for each pair of members and direction, in TLS where keys are needed.

- :mod:`~lsgd.client.groups.tcp.group` has the verbs.
- :mod:`~lsgd.client.groups.tcp.lines` moves bytes: two threads for all connections.
- :mod:`~lsgd.client.groups.tcp.mesh` makes the connections: a third thread.
- :mod:`~lsgd.client.groups.tcp.routes` decides how a connection comes to be.
- :mod:`~lsgd.client.groups.tcp.hello` is what both ends say first.
- :mod:`~lsgd.client.groups.tcp.tls` makes contexts of the run's certificate.
"""
