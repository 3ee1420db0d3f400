"""What lsgd is compared with: the programs that people would otherwise use. They need torch, and nothing of lsgd."""
