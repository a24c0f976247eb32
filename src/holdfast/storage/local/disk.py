"""The system calls of the local storage, one method each. A folder handle and a name enter; nothing is decided here.

This is the seam where the testing kit records what reaches the disk, fails it or stops it at the n-th call. So each
method does one thing to the disk, takes no key and no path below the root, raises plain `OSError`, and never follows
a link below the root. Handles are file descriptors.
"""

from __future__ import annotations

import errno
import os
import stat

from holdfast.storage.local.page_cache import PageCache

__all__ = ["Disk"]

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO in the place of a file must not wait for a writer to come.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FILE_MODE = 0o666
_FOLDER_MODE = 0o777
_RENAME_NOREPLACE = 1


class Disk:
    """The disk as it is. `cache` has the calls that are about the page cache."""

    cache = PageCache()

    # Folders

    def open_root(self, path: str) -> int:
        """Return a handle of a folder by its path; the only call that follows links: the user chose the root."""
        return os.open(path, _FOLDER_FLAGS)

    def open_folder(self, folder: int, name: str) -> int:
        return os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)

    def make_folder(self, folder: int, name: str) -> None:
        os.mkdir(name, _FOLDER_MODE, dir_fd=folder)

    def remove_folder(self, folder: int, name: str) -> None:
        os.rmdir(name, dir_fd=folder)

    def list_kinds(self, folder: int) -> dict[str, int]:
        """Return the names in a folder, each with `stat.S_IFDIR` for a folder, `stat.S_IFLNK` for a link, 0 for all
        else: most file systems tell these apart in the listing itself, without a look at each name."""
        with os.scandir(folder) as found:
            return {
                entry.name: stat.S_IFDIR
                if entry.is_dir(follow_symlinks=False)
                else (stat.S_IFLNK if entry.is_symlink() else 0)
                for entry in found
            }

    def list_folders(self, folder: int) -> list[str]:
        """Return the names of the folders in a folder."""
        with os.scandir(folder) as found:
            return [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]

    def fsync_folder(self, folder: int) -> None:
        os.fsync(folder)

    # Files

    def create_file(self, folder: int, name: str) -> int:
        """Return a new, empty file; `FileExistsError` when there is anything under that name."""
        return os.open(name, _CREATE_FLAGS, _FILE_MODE, dir_fd=folder)

    def create_unnamed(self, folder: int) -> int:
        """Return a new file of that folder's file system that has no name yet and vanishes if it never gets one."""
        return os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, _FILE_MODE, dir_fd=folder)

    def open_file(self, folder: int, name: str) -> int:
        """Return a handle for reading. It may be of something that is no regular file: look at its status."""
        return os.open(name, _READ_FLAGS, dir_fd=folder)

    def reopen_file(self, file: int) -> int:
        """Return a second handle for reading the file of a handle, whatever its name leads to by now."""
        return os.open(f"/proc/self/fd/{file}", _READ_FLAGS & ~os.O_NOFOLLOW)

    def write_at(self, file: int, data: memoryview, offset: int) -> int:
        """Return how many of the bytes were written, which may be fewer than were given."""
        return os.pwrite(file, data, offset)

    def read_at(self, file: int, target: memoryview, offset: int) -> int:
        """Return how many bytes were read, which may be fewer than fit; 0 is the end of the file."""
        return os.preadv(file, [target], offset)

    def fsync_file(self, file: int) -> None:
        os.fsync(file)

    # Names

    def link_unnamed(self, file: int, folder: int, name: str) -> None:
        """Give an unnamed file its name; `FileExistsError` when it is taken."""
        os.link(f"/proc/self/fd/{file}", name, dst_dir_fd=folder, follow_symlinks=True)

    def link(self, folder: int, name: str, new_folder: int, new_name: str) -> None:
        """Give a file a second name, in the same folder or in another; `FileExistsError` when it is taken."""
        os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder, follow_symlinks=False)

    def rename_exclusive(self, folder: int, name: str, new_name: str) -> None:
        """Rename; `FileExistsError` when the new name is taken, which a plain rename would silently replace."""
        # Imported here: few file systems need it, and it costs more than the rest of this module together.
        import ctypes

        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is None:
            raise OSError(errno.ENOSYS, "this C library has no renameat2")
        if renameat2(folder, os.fsencode(name), folder, os.fsencode(new_name), _RENAME_NOREPLACE) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def rename(self, folder: int, name: str, new_name: str) -> None:
        """Rename and replace. For the links that are made for people; a key is never replaced."""
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=folder)

    def symlink(self, target: str, folder: int, name: str) -> None:
        os.symlink(target, name, dir_fd=folder)

    def read_link(self, folder: int, name: str) -> str:
        return os.readlink(name, dir_fd=folder)

    def unlink(self, folder: int, name: str) -> None:
        os.unlink(name, dir_fd=folder)

    # Looking, and letting go

    def status(self, folder: int, name: str) -> os.stat_result:
        """Return what is under that name, a link itself and not what it points to."""
        return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def status_of(self, handle: int) -> os.stat_result:
        return os.fstat(handle)

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def close(self, handle: int) -> None:
        os.close(handle)
