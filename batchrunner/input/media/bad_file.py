"""The error of a file that cannot be sent."""


class BadFileError(Exception):
    """An image, audio, a video or a document that cannot be sent; its text says why, after what it is."""
