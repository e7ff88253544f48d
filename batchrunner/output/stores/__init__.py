"""Object stores (S3, Google, Azure): how one is opened, and what its errors mean.

`addresses` tells the URIs of object stores from other paths; `opening` opens one by obstore, an extra.
"""
