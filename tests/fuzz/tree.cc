// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Folders from another host: chunks in any order, with any name. Nothing appears outside of the folder.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "agent/file_tree.h"
#include "seeds.h"

namespace {

namespace fs = std::filesystem;
using migr::wire::FileChunk;

FileChunk chunk(const std::string& name, std::uint32_t mode, const std::string& data = "", const std::string& link = "") {
  FileChunk c;
  c.set_name(name);
  c.set_mode(mode);
  c.set_uid(getuid());
  c.set_gid(getgid());
  c.set_data(data);
  c.set_link(link);
  return c;
}
std::string stream(const std::vector<FileChunk>& chunks) {
  std::string out;
  for (const FileChunk& c : chunks) out += part(c.SerializeAsString());
  return out;
}
std::size_t entries_of(const fs::path& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

/// outside/ has the folder, a file and another folder, which nothing may change.
struct Place {
  Place() {
    outside = own_folder();
    folder = outside / "folder";
    fs::create_directory(outside / "other");
  }
  ~Place() { (void)migr::remove_folder(outside); }
  fs::path outside, folder;
};

}  // namespace

std::vector<std::string> seeds() {
  FileChunk whole = chunk("d/file", S_IFREG | 0640, "some bytes");
  // Of these ten bytes, as TreeWriter's other end sends it.
  std::vector<FileChunk> sent;
  {
    Place from;
    fs::create_directories(from.folder / "d");
    std::ofstream(from.folder / "d" / "file") << "some bytes";
    fs::create_symlink("d/file", from.folder / "link");
    (void)migr::send_tree(from.folder, FileChunk::IMAGES, 1 << 20, [&](const FileChunk& c) { return sent.push_back(c), true; });
  }
  return {stream(sent), stream({chunk("up", S_IFLNK | 0777, "", ".."), chunk("up/file", S_IFREG | 0600, "x")}),
          stream({chunk("../other/file", S_IFREG | 0600, "x")}), stream({chunk("up", S_IFLNK | 0777, "", "../other"), chunk("up/d", S_IFDIR | 0700)}),
          stream({whole, chunk("other", S_IFREG | 0600, "y")})};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Place to;
  fs::create_directory(to.folder);
  {
    migr::TreeWriter writer(to.folder);
    for (const std::string_view p : parts(data, size)) {
      FileChunk c;
      if (!c.ParseFromArray(p.data(), static_cast<int>(p.size()))) continue;
      c.set_uid(getuid());  // others' are root's to give
      c.set_gid(getgid());
      if (!writer.write(c)) break;
    }
    (void)writer.finish();
  }
  always(entries_of(to.outside) == 2 && entries_of(to.outside / "other") == 0, "nothing was written outside of the folder");
  struct stat st {};
  always(!lstat(to.folder.c_str(), &st) && S_ISDIR(st.st_mode), "the folder is one");
  return 0;
}
