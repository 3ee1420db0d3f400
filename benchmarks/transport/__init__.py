"""The groups over TCP, plain and in TLS, beside those over Gloo."""
