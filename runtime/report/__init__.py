"""How a verdict is shown and kept: tables, HTML, curves."""
