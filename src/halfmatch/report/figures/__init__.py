"""The figures, by what they show; `style` is what they have in common."""
