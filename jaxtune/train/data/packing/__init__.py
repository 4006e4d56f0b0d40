"""From documents to packed rows and steps."""
