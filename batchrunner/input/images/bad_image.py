"""The error of an image that cannot be sent."""


class BadImageError(Exception):
    """An image, a document or a file that cannot be sent; its text says why, after the name of what it is."""
