// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Folders as a stream of FileChunk messages, each regular file with a checksum.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "status.h"
#include "wire.pb.h"

namespace migr {

/// How much of folders has been sent.
struct Sent {
  std::atomic<std::uint64_t> bytes = 0;   // of data
  std::atomic<std::uint64_t> passed = 0;  // and of zeros, which are not
  void add(const wire::FileChunk& c) {
    bytes += c.data().size();
    passed += c.data().size() + c.zeros();
  }
};

/// Of images that a program may still be writing: true when it has ended, and with an error when they will never be whole.
using Written = std::function<Result<bool>()>;
inline Result<bool> all_written() { return true; }

/// Sends all of `folder`: folders, regular files (zeros become holes), FIFOs, symbolic
/// links, with mode and owner; sockets and devices are left out (which is logged of a bundle), and so
/// is what is mounted below it.
/// @param limit    bytes of file data, EFBIG beyond
/// @param send     false ends it early, which is no error here
/// @param written  until it says true, memory is sent as it comes: CRIU's pages-N.img, which are appended to, one after
///                 the other; everything else is sent after that. Its error ends it at any time
Status send_tree(const std::string& folder, wire::FileChunk::Tree tree, std::uint64_t limit,
                 const std::function<bool(const wire::FileChunk&)>& send, const Written& written = all_written);

/// What there was of a folder when it was sent, to send later what has changed since.
class SentFiles {
 public:
  /// Before it is sent. What is written to a mapped file is seen if that was on the disk before: so it puts everything there.
  Status begin(const std::string& folder);
  void add(const std::string& name, const struct stat& st);
  /// It has not changed since.
  bool has(const std::string& name, const struct stat& st) const;
  /// It is being sent for the first time, and will be again.
  bool first() const { return first_; }
  void sent() { first_ = false; }
  void forget() { files_.clear(); }

 private:
  struct File {
    ino_t inode;
    std::int64_t changed_ns;  // as st_ctim
  };
  std::int64_t began_ns_ = 0;
  bool first_ = true;
  std::map<std::string, File> files_;
};

/// As long as it lives, a file in a folder, by which another host sees that it has the same one.
class FolderMark {
 public:
  explicit FolderMark(const std::string& folder);
  FolderMark(const FolderMark&) = delete;
  FolderMark& operator=(const FolderMark&) = delete;
  ~FolderMark();
  /// Empty: it could not be made.
  const std::string& name() const { return name_; }

 private:
  const std::string folder_;
  std::string name_;
};
bool has_mark(const std::string& folder, const std::string& name);

/// Of a bundle: the folder with the root filesystem, as a name in it, if the container may write there and it is copied with the
/// bundle. Empty: it is read-only, or lies elsewhere. EOPNOTSUPP: it is the bundle itself.
Result<std::string> writable_root(const std::string& bundle);

/// As send_tree(), but what `sent` has; notes there what it sends, and logs the first time only. That time files may come, go and change meanwhile.
/// @param prefix  before names in `sent`
Status send_changes(const std::string& folder, wire::FileChunk::Tree tree, std::uint64_t limit, const std::function<bool(const wire::FileChunk&)>& send,
                    SentFiles& sent, const std::string& prefix = {});

/// All that is in a folder, as send_tree() goes through it.
Result<std::map<std::string, wire::TreeName>> names_below(const std::string& folder);
/// Takes away what `names` does not have, or what is of another type there: never what is mounted there, nor what symbolic links lead
/// to. EBUSY: a mount is in the way.
Status remove_others(const std::string& folder, const std::map<std::string, wire::TreeName>& names);

/// A folder that only we write to. One that is not there is made, with what is above it; one that is there keeps its mode.
/// EPERM: it belongs to somebody else, or others may write to it.
Status make_own_folder(const std::string& folder, mode_t mode);

/// Removes a folder with all that is in it, but nothing of what is mounted in it: that is unmounted. (A CRIU that is killed
/// leaves its mounts behind, and going down there would remove what is the host's.) Not there: no error. EBUSY: a mount is in the way.
Status remove_folder(const std::string& name);

/// Of its regular files, as Sent counts what has passed; of what cannot be read: 0.
std::uint64_t bytes_below(const std::string& folder);

/// What it holds. Empty: it is, or it cannot be read, as what is in /proc of a process that has just ended.
std::string text_of(const std::string& path);
/// Empty: it is, or it cannot be read.
std::string first_line_of(const std::string& path);

/// The same of a file of ours, where it matters that it is all. ENOENT: there is none.
Result<std::string> read_whole(const std::string& path);
/// Of such a file, with `text` in it, not all could be understood: `text` is kept as PATH.bad, which an error in the log says, and `rest` takes its place.
Status put_aside(const std::string& path, const std::string& text, const std::string& rest);

/// A file with this content, whole or not at all, and on the disk when it returns. Mode 0600.
Status write_whole(const std::string& path, const std::string& text);

/// 128 bits over a regular file's content, big endian. For those over a text, the second.
Result<std::string> checksum_of_file(const std::string& path);
std::string checksum_of(const std::string& text);

Result<wire::FolderMode> folder_mode(const std::string& folder);
Status set_folder_mode(const std::string& folder, const wire::FolderMode& to);

/// The other end: writes chunks below a folder, never outside of it and never
/// through a symbolic link. Files appear under their names only when their
/// checksum is right. A folder takes the place of what is none, and the reverse; EBUSY: a mount is in the way. Thread: one.
class TreeWriter {
 public:
  explicit TreeWriter(const std::string& folder);
  ~TreeWriter();
  Status write(const wire::FileChunk& c);
  /// EIO: a file is incomplete.
  Status finish();
  std::uint64_t bytes() const { return bytes_; }
  std::uint32_t files() const { return files_; }

 private:
  struct Open;
  const std::string folder_;
  std::unique_ptr<Open> open_;
  std::uint64_t bytes_ = 0;
  std::uint32_t files_ = 0;
};

}  // namespace migr
