// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#include "stack_walk.h"

#include <elf.h>
#include <libunwind-x86_64.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "aside.h"
#include "limits.h"
#include "mappings.h"

// libunwind exports it for unwinders with accessors of their own, and has it in no header.
extern "C" int UNW_OBJ(dwarf_search_unwind_table)(unw_addr_space_t, unw_word_t ip, unw_dyn_info_t*, unw_proc_info_t*, int need_unwind_info, void* arg);

namespace migr {
namespace {

constexpr int kMaxFrames = 512;
constexpr unsigned kMaxHeaders = 64;  // of an ELF file

// `arg` of all accessors.
struct Walk {
  const pid_t pid;
  const user_regs_struct& regs;
  std::vector<Mapping> maps;
  unsigned reads = 0;

  // With what is left of it.
  bool read(std::uint64_t at, void* to, std::size_t bytes) {
    if (++reads > kMaxWalkReads) return false;
    iovec local{to, bytes}, remote{reinterpret_cast<void*>(at), bytes};
    return process_vm_readv(pid, &local, 1, &remote, 1, 0) == static_cast<ssize_t>(bytes);
  }
};

// Where the ELF file that is mapped at `ip` begins: the vdso is no file, and one mapping.
const Mapping* begin_of(const std::vector<Mapping>& maps, std::uint64_t ip) {
  const auto at = std::find_if(maps.begin(), maps.end(), [&](const Mapping& m) { return ip >= m.start && ip < m.end; });
  if (at == maps.end()) return nullptr;
  for (auto m = at;; --m) {
    if (m->inode == at->inode && m->major == at->major && m->minor == at->minor && !m->offset) return &*m;
    if (m == maps.begin() || !at->inode) return nullptr;
  }
}

// The table behind PT_GNU_EH_FRAME, of the one layout that linkers make.
struct [[gnu::packed]] EhFrameHdr {
  std::array<std::uint8_t, 4> form;
  std::uint32_t eh_frame, entries;
};
constexpr std::array<std::uint8_t, 4> kForm = {1, 0x1b, 0x03, 0x3b};  // version, sdata4 from here, udata4, sdata4 from its begin

int find_proc_info(unw_addr_space_t space, unw_word_t ip, unw_proc_info_t* info, int need_unwind_info, void* arg) {
  Walk& w = *static_cast<Walk*>(arg);
  const Mapping* begin = begin_of(w.maps, ip);
  Elf64_Ehdr elf{};
  if (!begin || !w.read(begin->start, &elf, sizeof elf) || std::memcmp(elf.e_ident, ELFMAG, SELFMAG) || elf.e_ident[EI_CLASS] != ELFCLASS64 ||
      elf.e_phentsize != sizeof(Elf64_Phdr) || !elf.e_phnum || elf.e_phnum > kMaxHeaders)
    return -UNW_ENOINFO;
  std::array<Elf64_Phdr, kMaxHeaders> headers;
  if (!w.read(begin->start + elf.e_phoff, headers.data(), elf.e_phnum * sizeof headers[0])) return -UNW_ENOINFO;
  const Elf64_Phdr *load = nullptr, *eh = nullptr;
  for (const auto* h = headers.data(); h != headers.data() + elf.e_phnum; h++) {
    if (h->p_type == PT_LOAD && !load) load = h;
    if (h->p_type == PT_GNU_EH_FRAME) eh = h;
  }
  if (!load || !eh) return -UNW_ENOINFO;
  const std::uint64_t at = begin->start - (load->p_vaddr - load->p_offset) + eh->p_vaddr;
  EhFrameHdr table{};
  if (!w.read(at, &table, sizeof table) || table.form != kForm) return -UNW_ENOINFO;
  unw_dyn_info_t di{};
  di.start_ip = ip;  // of the file, as far as anybody asks
  di.end_ip = ip + 1;
  di.format = UNW_INFO_FORMAT_REMOTE_TABLE;
  di.u.rti.segbase = at;
  di.u.rti.table_data = at + sizeof table;
  di.u.rti.table_len = table.entries;
  return UNW_OBJ(dwarf_search_unwind_table)(space, ip, &di, info, need_unwind_info, arg);
}

int access_mem(unw_addr_space_t, unw_word_t at, unw_word_t* value, int write, void* arg) {
  return write || !static_cast<Walk*>(arg)->read(at, value, sizeof *value) ? -UNW_EINVAL : 0;
}

int access_reg(unw_addr_space_t, unw_regnum_t reg, unw_word_t* value, int write, void* arg) {
  const user_regs_struct& r = static_cast<Walk*>(arg)->regs;
  if (write) return -UNW_EREADONLYREG;
  switch (reg) {
    case UNW_X86_64_RAX: return *value = r.rax, 0;
    case UNW_X86_64_RDX: return *value = r.rdx, 0;
    case UNW_X86_64_RCX: return *value = r.rcx, 0;
    case UNW_X86_64_RBX: return *value = r.rbx, 0;
    case UNW_X86_64_RSI: return *value = r.rsi, 0;
    case UNW_X86_64_RDI: return *value = r.rdi, 0;
    case UNW_X86_64_RBP: return *value = r.rbp, 0;
    case UNW_X86_64_RSP: return *value = r.rsp, 0;
    case UNW_X86_64_R8: return *value = r.r8, 0;
    case UNW_X86_64_R9: return *value = r.r9, 0;
    case UNW_X86_64_R10: return *value = r.r10, 0;
    case UNW_X86_64_R11: return *value = r.r11, 0;
    case UNW_X86_64_R12: return *value = r.r12, 0;
    case UNW_X86_64_R13: return *value = r.r13, 0;
    case UNW_X86_64_R14: return *value = r.r14, 0;
    case UNW_X86_64_R15: return *value = r.r15, 0;
    case UNW_X86_64_RIP: return *value = r.rip, 0;
    default: return -UNW_EBADREG;
  }
}

bool walk(pid_t pid, const user_regs_struct& regs, const std::function<bool(std::uint64_t, bool)>& inside) {
  unw_accessors_t accessors{};
  accessors.find_proc_info = find_proc_info;
  accessors.put_unwind_info = [](unw_addr_space_t, unw_proc_info_t*, void*) {};
  accessors.get_dyn_info_list_addr = [](unw_addr_space_t, unw_word_t*, void*) { return -UNW_ENOINFO; };
  accessors.access_mem = access_mem;
  accessors.access_reg = access_reg;
  accessors.access_fpreg = [](unw_addr_space_t, unw_regnum_t, unw_fpreg_t*, int, void*) { return -UNW_EBADREG; };
  accessors.resume = [](unw_addr_space_t, unw_cursor_t*, void*) { return -UNW_EINVAL; };
  accessors.get_proc_name = [](unw_addr_space_t, unw_word_t, char*, size_t, unw_word_t*, void*) { return -UNW_ENOINFO; };
  Walk w{pid, regs, mappings_of(pid)};
  unw_addr_space_t space = unw_create_addr_space(&accessors, 0);
  unw_cursor_t c;
  if (!space || unw_init_remote(&c, space, &w)) return true;
  for (int i = 0; i < kMaxFrames; i++) {
    unw_word_t ip = 0;
    if (unw_get_reg(&c, UNW_REG_IP, &ip) || (ip && inside(ip, i > 0))) return true;
    const int r = unw_step(&c);
    if (r <= 0) return r < 0;
  }
  return true;
}

}  // namespace

bool frames_inside(pid_t pid, const user_regs_struct& regs, const std::function<bool(std::uint64_t, bool)>& inside) {
  constexpr int kOutside = 0, kInside = 1;
  const pid_t child = fork_aside();
  if (!child) _exit(walk(pid, regs, inside) ? kInside : kOutside);
  return child < 0 || exit_of(child, kScanWalkMs) != kOutside;
}

}  // namespace migr
