"""How figures look: one style and palette, panels of curves and dots, numbers as words. Probes draw with it, and the report."""
