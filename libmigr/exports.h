/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What libraries of this process export, by their tables. */
#ifndef MIGR_EXPORTS_H
#define MIGR_EXPORTS_H

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <string>

extern "C" {
[[gnu::visibility("hidden")]] extern const char __ehdr_start[];  // the linker's: where we begin and end
[[gnu::visibility("hidden")]] extern const char _end[];
}

namespace migr {

/// The functions that a library exports under its default versions. Of what is loaded, and without any memory: an allocator may
/// ask for the one that is behind it before there is another.
class Exports {
 public:
  explicit Exports(const link_map& library) : Exports(library.l_addr, library.l_ld) {}
  Exports(ElfW(Addr) base, const ElfW(Dyn) * dynamic) : base_(base) {
    for (const ElfW(Dyn)* d = dynamic; d && d->d_tag != DT_NULL; ++d) {
      if (d->d_tag == DT_SYMTAB) symbols_ = at<ElfW(Sym)>(d->d_un.d_ptr);
      if (d->d_tag == DT_STRTAB) names_ = at<char>(d->d_un.d_ptr);
      if (d->d_tag == DT_VERSYM) versions_ = at<std::uint16_t>(d->d_un.d_ptr);
      if (d->d_tag == DT_GNU_HASH) hash_ = at<std::uint32_t>(d->d_un.d_ptr);
    }
  }

  void* find(const char* name) const {
    if (!symbols_ || !names_ || !hash_ || !hash_[0]) return nullptr;
    constexpr std::uint16_t kHidden = 0x8000;  // of a version that only asks for it by name
    const std::uint32_t want = hash_of(name), count = hash_[0], first = hash_[1], words = hash_[2] * sizeof(ElfW(Addr)) / 4;
    const std::uint32_t* const buckets = hash_ + 4 + words;
    const std::uint32_t* const chains = buckets + count;
    for (std::uint32_t i = buckets[want % count]; i >= first && i; ++i) {
      const std::uint32_t here = chains[i - first];
      const ElfW(Sym)& symbol = symbols_[i];
      if ((here | 1) == (want | 1) && symbol.st_shndx != SHN_UNDEF && !std::strcmp(names_ + symbol.st_name, name) &&
          !(versions_ && versions_[i] & kHidden))
        return reinterpret_cast<void*>(base_ + symbol.st_value);
      if (here & 1) break;
    }
    return nullptr;
  }

 private:
  /// The loader has made most of these addresses of this process.
  template <class T>
  const T* at(ElfW(Addr) address) const {
    return reinterpret_cast<const T*>(address < base_ ? base_ + address : address);
  }
  static std::uint32_t hash_of(const char* name) {
    std::uint32_t h = 5381;
    for (; *name; ++name) h = h * 33 + static_cast<unsigned char>(*name);
    return h;
  }

  ElfW(Addr) base_;
  const ElfW(Sym) * symbols_ = nullptr;
  const char* names_ = nullptr;
  const std::uint16_t* versions_ = nullptr;
  const std::uint32_t* hash_ = nullptr;
};

inline bool is_self(ElfW(Addr) base) { return base == reinterpret_cast<ElfW(Addr)>(__ehdr_start); }

/// The file of the first library but us that exports `name`, whoever sees it. Empty: none does.
inline std::string exporter_of(const char* name) {
  struct Search {
    const char* name;
    std::string file;
  } search{name, {}};
  const auto look = [](dl_phdr_info* library, std::size_t, void* p) {
    auto& s = *static_cast<Search*>(p);
    for (int i = 0; i < library->dlpi_phnum && !is_self(library->dlpi_addr); ++i) {
      const ElfW(Phdr)& part = library->dlpi_phdr[i];
      if (part.p_type == PT_DYNAMIC && Exports(library->dlpi_addr, reinterpret_cast<const ElfW(Dyn)*>(library->dlpi_addr + part.p_vaddr)).find(s.name)) s.file = library->dlpi_name;
    }
    return s.file.empty() ? 0 : 1;
  };
  dl_iterate_phdr(look, &search);
  return search.file;
}

/// libibverbs, if it is loaded, also by dlopen(RTLD_LOCAL) and by a name of its own: Python's wheels bring libibverbs-0123abcd.so.1. Null: it is not;
/// else to be closed with dlclose().
inline void* loaded_libibverbs() {
  void* const handle = dlopen("libibverbs.so.1", RTLD_NOLOAD | RTLD_NOW);
  const std::string other = handle ? "" : exporter_of("ibv_open_device");
  return other.empty() ? handle : dlopen(other.c_str(), RTLD_NOLOAD | RTLD_NOW);
}

}  // namespace migr

#endif
