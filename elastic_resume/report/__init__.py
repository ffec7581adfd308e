"""From events to text, page, metrics and status."""
