"""Tests in the folders of the package; e2e/ has tests of whole runs, and support/ what tests share."""
