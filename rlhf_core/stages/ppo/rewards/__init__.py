"""From rewards of an answer's sources to the advantages of its tokens."""
