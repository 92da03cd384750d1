"""What protects coslice, in one place: fingerprints, private files, redaction, tokens, TLS, access.

Standard library and gRPC only, so that clients may use it too. ``docs/security.md`` has the threat model.
"""
