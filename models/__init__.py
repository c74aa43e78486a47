"""Decoder-only transformer families and their weights (installed as sarathi_jax.models)."""
