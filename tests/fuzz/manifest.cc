// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// checkpoint.json: as it is, or as changes to one that was written, with the checksum made right again, so that mutations get
// behind it.
#include "agent/manifest.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "agent/file_tree.h"
#include "agent/hex.h"
#include "seeds.h"

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

/// Of a part of the input, its first byte: what the rest is.
enum Kind : char { kRaw = 'r',
                   kPatch = 'p' };

migr::ContainerInfo container() {
  migr::ContainerInfo c;
  c.id = "web";
  c.bundle = "/srv/web";
  c.devices = {"rxe0"};
  c.vqpns = {17, 0xffffff};
  c.pids = {7, 8};
  c.instances.emplace_back()[0] = 1;
  c.gids.emplace_back().set_gid(std::string(16, 'g'));
  c.earlier = {{0, std::string(16, 'e')}};
  c.ctxs = {{1, 0}};
  c.connected = {{1, 17, 18, std::string(16, 'a'), std::string(16, 'b'), 19}};
  c.needs.emplace_back();
  c.filled_bytes = 4096;
  return c;
}

Json read(const fs::path& path) {
  std::ifstream in(path);
  return Json::parse(in);
}

/// A folder with an image and a bundle, and the manifest of it.
struct Place {
  Place() : path(own_folder()) {
    fs::create_directory(path / "images");
    std::ofstream(path / "images" / "pages-1.img") << "page";
    fs::create_directories(path / "bundle" / "rootfs");
    std::ofstream(path / "bundle" / "config.json") << "{}";
    fs::create_symlink("rootfs", path / "bundle" / "link");
    always(bool(migr::write_manifest(path, container())), "what is stored is written");
    written = read(path / migr::kManifest);
  }
  ~Place() { fs::remove_all(path); }
  const fs::path path;
  Json written;
};

std::string of(char kind, const Json& j) { return part(kind + j.dump()); }

}  // namespace

std::vector<std::string> seeds() {
  const Json info = Place().written;
  std::vector<std::string> out = {of(kRaw, info), of(kPatch, Json::object())};
  for (const auto& [key, value] : info.items()) {
    out.push_back(of(kPatch, {{key, value}}));
    out.push_back(of(kPatch, {{key, nullptr}}));
  }
  return out;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Place place;
  std::string text;
  Json patched = place.written;
  for (const std::string_view p : parts(data, size)) {
    if (p.empty()) continue;
    if (p[0] == kRaw) text = p.substr(1);
    if (p[0] != kPatch) continue;
    const Json patch = Json::parse(p.substr(1), nullptr, false);
    if (patch.is_object()) patched.merge_patch(patch);
  }
  if (text.empty()) {
    patched.erase("sum");
    patched["sum"] = migr::to_hex(migr::checksum_of(patched.dump()));
    text = patched.dump();
  }
  std::ofstream(place.path / migr::kManifest, std::ios::binary) << text;
  const auto info = migr::read_manifest(place.path);
  if (!info) {
    always(!info.error().text.empty(), "a refusal has its reason");
    return 0;
  }
  for (const auto& [ctx, owner] : info->ctxs) always(owner < info->instances.size(), "a context has its process");
  for (const auto& q : info->connected) always(q.gid.size() == 16 && q.dest_gid.size() == 16, "a GID has 16 bytes");
  always(bool(migr::write_manifest(place.path, *info)), "what was read can be written");
  const auto again = migr::read_manifest(place.path);
  always(again && again->id == info->id && again->vqpns == info->vqpns && again->connected.size() == info->connected.size(), "what was written can be read");
  return 0;
}
