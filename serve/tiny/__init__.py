"""The bundled model pair: a one-million-parameter target and its DSpark draft."""
