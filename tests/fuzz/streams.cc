// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What a container's standard streams were, and CRIU's images of its files and descriptors: as they are or message by message, so that
// mutations need not get the lengths right.
#include "agent/standard_streams.h"

#include <fcntl.h>

#include <filesystem>

#include "agent/file_tree.h"
#include "criu_files.pb.h"
#include "seeds.h"

namespace {

namespace fs = std::filesystem;
namespace criu = migr::criu;
constexpr std::uint32_t kImageMagic = 0x54564319, kFilesMagic = 0x56303138, kDescriptorsMagic = 0x56213732, kPipe = 2, kSocket = 5;

/// Of a part of the input, its first byte: what the rest is. Small letters: one message, without its length; capital ones: all bytes.
enum Kind : char { kFiles = 'f',
                   kDescriptors = 'd',
                   kStreams = 's' };  // descriptors.json

std::string framed(std::string_view message) { return bytes_of(static_cast<std::uint32_t>(message.size())).append(message); }
std::string magic(std::uint32_t of) { return bytes_of(kImageMagic) + bytes_of(of); }
std::string file(std::uint32_t id, std::uint32_t type, std::uint32_t pipe, std::uint32_t flags) {
  criu::File f;
  f.set_id(id);
  f.set_type(type);
  if (type != kPipe) return f.SerializeAsString();
  f.mutable_pipe()->set_id(id);
  f.mutable_pipe()->set_pipe_id(pipe);
  f.mutable_pipe()->set_flags(flags);
  f.mutable_pipe()->set_owner("\x08\x01");
  return f.SerializeAsString();
}
std::string descriptor(std::uint32_t id, std::uint32_t type) {
  criu::Descriptor d;
  d.set_id(id);
  d.set_type(type);
  return d.SerializeAsString();
}
std::string of(char kind, const std::string& text) { return part(kind + text); }

void put(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

}  // namespace

std::vector<std::string> seeds() {
  const std::string streams = of('s', R"(["pipe:[7]", "pipe:[8]", "/dev/pts/0"])");
  const std::string in = file(1, kPipe, 7, O_RDONLY), out = file(2, kPipe, 8, O_WRONLY | O_DIRECT), own = file(3, kPipe, 9, O_WRONLY), socket = file(2, kSocket, 0, 0);
  return {streams + of('f', in) + of('f', out) + of('f', own) + of('f', socket) + of('d', descriptor(1, kPipe)) + of('d', descriptor(2, kSocket)),
          streams + of('F', magic(kFilesMagic) + framed(in) + framed(out)) + of('D', magic(kDescriptorsMagic) + framed(descriptor(1, kPipe))),
          of('s', R"(["/dev/null", 1, {"pipe": []}])") + of('f', in), of('s', R"({"a": [")") + of('f', in)};
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const struct Place {
    Place() : path(own_folder()) {}
    ~Place() { fs::remove_all(path); }
    const fs::path path;
  } place;
  std::string streams, files, descriptors;
  for (const std::string_view p : parts(data, size)) {
    if (p.empty()) continue;
    std::string& all = (p[0] | 0x20) == kFiles ? files : (p[0] | 0x20) == kDescriptors ? descriptors
                                                                                       : streams;
    if (&all == &streams || p[0] < 'a')
      all = p.substr(1);
    else
      all = (all.empty() ? magic(&all == &files ? kFilesMagic : kDescriptorsMagic) : all) + framed(p.substr(1));
  }
  put(place.path / "descriptors.json", streams);
  put(place.path / "files.img", files);
  put(place.path / "fdinfo-2.img", descriptors);
  const auto read = [&] { return migr::text_of(place.path / "files.img") + migr::text_of(place.path / "fdinfo-2.img"); };
  if (const auto s = migr::pipes_to_null(place.path); !s) {
    always(!s.error().text.empty(), "a refusal has its reason");
    return 0;
  }
  const std::string once = read();
  always(bool(migr::pipes_to_null(place.path)), "what was written can be read");
  always(read() == once, "no pipe of them is left");
  return 0;
}
