"""Where saved state lies beyond host memory. Each tier is one module; ``agent.buffers`` decides when."""
