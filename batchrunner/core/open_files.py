"""What is said where a process has as many files open as it may."""

import errno
import resource

RAISE_LIMIT = "raise the limit, such as with `ulimit -n 1024`, and run the same command again"


def too_many_files(failure: BaseException) -> str | None:
    """Return what is wrong if an error comes from the limit on open files; else None.

    Errors that were raised while another one was handled count as that one.
    """
    seen: BaseException | None = failure
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno == errno.EMFILE:
            return (
                f"too many open files: this process may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
            )
        seen = seen.__cause__ or seen.__context__
    return None
