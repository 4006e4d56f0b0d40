"""From a row to text: formats of rows, conversations, chat templates, and what is trained."""
