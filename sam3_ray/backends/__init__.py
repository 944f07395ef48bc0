"""One folder a kind of machine; ``base`` is the protocol they share."""
