"""What tests of algorithms and codecs stand on: simulated workers, without processes or servers."""
