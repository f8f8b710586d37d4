// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "build_id.h"

#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>

#include "process.h"

namespace migr {
namespace {

constexpr unsigned kMaxElfHeaders = 64;
constexpr std::size_t kMaxNoteBytes = 64 << 10;

std::string build_id_in(const std::string& notes, std::size_t align) {
  const auto up = [align](std::size_t n) { return (n + align - 1) / align * align; };
  Elf64_Nhdr n;
  for (std::size_t at = 0; at + sizeof n <= notes.size();) {
    std::memcpy(&n, notes.data() + at, sizeof n);
    const std::size_t name = at + sizeof n, what = up(name + n.n_namesz);
    if (what + n.n_descsz > notes.size()) break;
    if (n.n_type == NT_GNU_BUILD_ID && notes.compare(name, n.n_namesz, std::string("GNU", 4)) == 0) return notes.substr(what, n.n_descsz);
    at = up(what + n.n_descsz);
  }
  return {};
}

// As mappings of it are named by the kernel, which is not on every file system what stat(2) says of it.
std::optional<Mapping> mapping_of(const std::string& file) {
  const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  void* const at = mmap(nullptr, 1, PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return std::nullopt;
  std::optional<Mapping> found;
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  each_mapping(getpid(), [&](const Mapping& m) {
    if (address >= m.start && address < m.end) found = m;
    return bool(found);
  });
  munmap(at, 1);
  return found;
}

}  // namespace

std::string build_id_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  const auto read = [&in](void* to, std::size_t bytes, std::uint64_t at) {
    return bool(in.seekg(static_cast<std::streamoff>(at)).read(static_cast<char*>(to), static_cast<std::streamsize>(bytes)));
  };
  Elf64_Ehdr elf{};
  if (!read(&elf, sizeof elf, 0) || std::memcmp(elf.e_ident, ELFMAG, SELFMAG) || elf.e_ident[EI_CLASS] != ELFCLASS64 || elf.e_phentsize != sizeof(Elf64_Phdr) ||
      elf.e_phnum > kMaxElfHeaders)
    return {};
  std::vector<Elf64_Phdr> headers(elf.e_phnum);
  if (!read(headers.data(), headers.size() * sizeof(Elf64_Phdr), elf.e_phoff)) return {};
  for (const auto& h : headers) {
    if (h.p_type != PT_NOTE || h.p_filesz > kMaxNoteBytes) continue;
    std::string notes(h.p_filesz, '\0');
    if (!read(notes.data(), notes.size(), h.p_offset)) return {};
    if (auto id = build_id_in(notes, h.p_align == 8 ? 8 : 4); !id.empty()) return id;
  }
  return {};
}

// By what the kernel says of its mappings: what they are of may lie on a file system that never answers.
Result<bool> maps_library(pid_t pid, const std::vector<Mapping>& mappings, const std::string& file) {
  constexpr char kReplaced[] = " (deleted)";
  std::error_code ec;
  const std::string name = file.substr(file.rfind('/') + 1), target = std::filesystem::canonical(file, ec).filename().string();
  const auto ours = mapping_of(file);
  bool found = false;
  for (const Mapping& m : mappings) {
    if (!m.executable) continue;
    std::string path = m.path;
    const bool replaced = path.ends_with(kReplaced);
    if (replaced) path.resize(path.size() - std::strlen(kReplaced));
    if (const auto of = path.substr(path.rfind('/') + 1); replaced && (of == name || of == target))
      return Error{EOPNOTSUPP, "process " + std::to_string(pid) + " (" + name_of(pid) + ") has a " + name + " that was replaced on this host since: start it again"};
    found = found || (ours && m.inode == ours->inode && m.major == ours->major && m.minor == ours->minor);
  }
  return found;
}

Status same_build(const std::string& theirs, const std::string& there, const std::string& file, const std::string& here) {
  const std::string ours = theirs.empty() ? "" : build_id_of(file);
  if (ours.empty() || ours == theirs) return {};
  return Error{EBUSY, "libmigr is of another build on " + here + " (" + file + ") than what programs run on " + there + ", and CRIU restores them with the same only; install the same release of libmigr on both hosts"};
}

}  // namespace migr
