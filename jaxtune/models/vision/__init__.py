"""Pictures as a model reads them, and the towers that make features of their patches."""
