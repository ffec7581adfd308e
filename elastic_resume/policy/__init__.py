"""Pure decisions: frozen values in, a frozen decision out."""
