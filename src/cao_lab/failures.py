"""Whose failure an exception tells of: the user's and the machine's take a line, ours a traceback."""

import errno

SURROUNDINGS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EIO, errno.ESTALE),
    *(errno.ENOTEMPTY, errno.EBUSY, errno.ENODEV, errno.ENXIO),
}
"""What a file system or a disk may be like whatever the code does. A file that is not there is our mistake, because
commands look for the user's files before they open them."""


def is_expected(error: BaseException) -> bool:
    """Whether the error speaks to the user rather than to a programmer: ours, the file system's, or want of memory."""
    is_out_of_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
    is_of_surroundings = isinstance(error, OSError) and error.errno in SURROUNDINGS
    return type(error).__module__.startswith("cao_lab") or is_out_of_memory or is_of_surroundings
