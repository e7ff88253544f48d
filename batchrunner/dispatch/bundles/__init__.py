"""Bundles: several rows in one request, each answered when it ends."""
