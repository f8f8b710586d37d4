// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// migr-files.img, from another host or from a folder, which the plugin reads: as it is, with an envelope whose checksum fits, and
// written as text.
#include "migr/restore.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>

#include "migr.pb.h"
#include "sealed.h"
#include "seeds.h"

namespace {

constexpr std::string_view kMagic{"migrfil\0", 8};

struct Place {
  Place() : path(own_folder()), fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) { always(fd >= 0, "the folder can be opened"); }
  ~Place() {
    close(fd);
    std::filesystem::remove_all(path);
  }
  const std::filesystem::path path;
  const int fd;
};

std::string stored(const Place& p, const std::vector<migr_rst_file>& files) {
  migr_rst_err err{};
  always(!migr_rst_files_write(files.data(), static_cast<std::uint32_t>(files.size()), p.fd, &err), "it can be written");
  std::ifstream in(p.path / MIGR_RST_FILES_NAME, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

std::vector<std::string> seeds() {
  const Place p;
  const std::string full = stored(p, {{0x21, 4711, 10, MIGR_FD_CONTEXT, 7, 0, 0}, {0x22, 4711, 10, MIGR_FD_CHANNEL, -1, 1, 1}});
  const std::string payload = full.substr(kEnvelope);
  return {payload, full, to_text<migr::Files>(payload), stored(p, {}).substr(kEnvelope), "x"};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Place place;
  const std::string file = image_of<migr::Files>(kMagic, {reinterpret_cast<const char*>(data), size});
  const int fd = openat(place.fd, MIGR_RST_FILES_NAME, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  always(fd >= 0 && write(fd, file.data(), file.size()) == static_cast<ssize_t>(file.size()), "there is room");
  close(fd);
  migr_rst_file* files = nullptr;
  std::uint32_t nr = 0;
  migr_rst_err err{};
  if (migr_rst_files_read(place.fd, &files, &nr, &err)) {
    always(err.text[0] && std::memchr(err.text, 0, sizeof err.text), "a refusal has its reason");
    return 0;
  }
  const std::vector<migr_rst_file> all(files, files + nr);
  std::free(files);
  always(!migr_rst_files_write(all.data(), nr, place.fd, &err), "what was taken can be stored");
  always(!migr_rst_files_read(place.fd, &files, &nr, &err) && nr == all.size(), "and is taken again");
  for (std::uint32_t i = 0; i < nr; i++) always(!std::memcmp(&files[i], &all[i], sizeof all[i]), "as it was");
  std::free(files);
  return 0;
}
