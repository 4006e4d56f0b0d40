"""Model families, one file each. They share common.py and never import each other."""
