"""Generated protobuf and the one table between errors and wire codes."""
