/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
#include "kernel_link.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "high_fd.h"

namespace migr {
namespace {

constexpr char kDevice[] = "/dev/" MIGR_DEV_NAME;

void say_once(const std::string& what) {
  static std::atomic<bool> said;
  if (!said.exchange(true)) fprintf(stderr, "libmigr: %s; this process runs as usual but cannot be migrated\n", what.c_str());
}

bool private_wanted() {
  const char* tables = getenv("MIGR_TABLES");
  return tables && strcmp(tables, "private") == 0;
}

void* table_of(int fd, void* where, std::size_t bytes, std::uint64_t offset) {
  void* p = mmap(where, bytes, PROT_READ, MAP_SHARED | (where ? MAP_FIXED : 0), fd, static_cast<off_t>(offset));
  return p == MAP_FAILED ? nullptr : p;
}

/// @return a descriptor at a high number that serves `uverbs_fd`'s context, or a negative errno
int open_attached(int uverbs_fd, std::uint32_t& ctx_id, std::uint32_t& module_abi) {
  const int fd = to_high_fd(open(kDevice, O_RDWR | O_CLOEXEC));
  if (fd < 0) return -errno;
  migr_ioc_attach attach{MIGR_ABI_VERSION, uverbs_fd, 0, 0};
  if (ioctl(fd, MIGR_IOC_ATTACH, &attach) != 0) {
    const int error = errno;
    module_abi = attach.abi_version;
    close_own(fd);
    return -error;
  }
  ctx_id = attach.ctx_id;
  return fd;
}

}  // namespace

void* private_memory(void* where, std::size_t bytes, int access) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (where ? MAP_FIXED : 0);
  void* p = mmap(where, bytes, access, flags, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  madvise(p, bytes, MADV_DONTDUMP);
  madvise(p, bytes, MADV_NOHUGEPAGE);  // one entry must not cost 2 MiB
  return p;
}

KernelLink::KernelLink(int uverbs_fd) {
  if (private_wanted()) {
    why_private_ = "MIGR_TABLES=private";
  } else {
    std::uint32_t module_abi = MIGR_ABI_VERSION;
    const int fd = open_attached(uverbs_fd, ctx_id_, module_abi);
    if (fd >= 0) {
      qpn_table_ = static_cast<std::uint32_t*>(table_of(fd, nullptr, MIGR_QPN_TABLE_BYTES, MIGR_QPN_TABLE_OFFSET));
      key_table_ = static_cast<migr_key_entry*>(table_of(fd, nullptr, MIGR_KEY_TABLE_BYTES, MIGR_KEY_TABLE_OFFSET));
      if (qpn_table_ && key_table_) {
        fd_ = fd;
        return;
      }
      why_private_ = std::string("cannot map the tables of /dev/migr: ") + strerror(errno);
      if (qpn_table_) munmap(qpn_table_, MIGR_QPN_TABLE_BYTES);
      if (key_table_) munmap(key_table_, MIGR_KEY_TABLE_BYTES);
      close_own(fd);
      ctx_id_ = 0;
    } else if (fd == -EPROTONOSUPPORT) {
      why_private_ = "migr.ko speaks ABI version " + std::to_string(module_abi) + ", this library " + std::to_string(MIGR_ABI_VERSION) + ": install matching ones";
    } else if (fd == -ENOENT && access(kDevice, F_OK) != 0) {
      why_private_ = "no /dev/migr (is migr.ko loaded, does the container have it?)";
    } else {
      why_private_ = std::string("cannot attach to /dev/migr: ") + strerror(-fd);
    }
    say_once(why_private_);
  }
  qpn_table_ = static_cast<std::uint32_t*>(private_memory(nullptr, MIGR_QPN_TABLE_BYTES));
  key_table_ = static_cast<migr_key_entry*>(private_memory(nullptr, MIGR_KEY_TABLE_BYTES));
  if (!has_tables()) say_once("no address space for 192 MiB of tables (ulimit -v)");
}

KernelLink::~KernelLink() {
  if (qpn_table_) munmap(qpn_table_, MIGR_QPN_TABLE_BYTES);
  if (key_table_) munmap(key_table_, MIGR_KEY_TABLE_BYTES);
  close_own(fd_);
}

int KernelLink::make_writable() {
  if (!read_only_) return 0;
  if (mprotect(qpn_table_, MIGR_QPN_TABLE_BYTES, PROT_READ | PROT_WRITE) || mprotect(key_table_, MIGR_KEY_TABLE_BYTES, PROT_READ | PROT_WRITE)) return errno;
  read_only_ = false;
  return 0;
}

int KernelLink::bind_qp(std::uint32_t vqpn, std::uint32_t pqpn) {
  if ((vqpn | pqpn) & ~MIGR_QPN_MASK) return ERANGE;
  if (!attached()) {
    if (const int error = make_writable()) return error;
    __atomic_store_n(&qpn_table_[pqpn], vqpn | MIGR_QPN_VALID, __ATOMIC_RELEASE);
    if (vqpn == pqpn) names_.erase(vqpn);
    else names_.insert(vqpn);
    return 0;
  }
  migr_ioc_bind_qp bind{vqpn, pqpn};
  return ioctl(fd_, MIGR_IOC_BIND_QP, &bind) == 0 ? 0 : errno;
}

bool KernelLink::is_name_of_another(std::uint32_t pqpn) const {
  if (!attached()) return names_.contains(pqpn);
  const std::uint32_t entry = qpn_table_[pqpn & MIGR_QPN_MASK];
  return (entry & MIGR_QPN_VALID) && (entry & MIGR_QPN_MASK) != pqpn;
}

int KernelLink::stands(std::uint32_t pqpn, std::uint32_t state) {
  if (!attached()) return 0;
  migr_ioc_qp_stands stands{pqpn, state};
  return ioctl(fd_, MIGR_IOC_QP_STANDS, &stands) == 0 ? 0 : errno;
}

int KernelLink::bind_mr(std::uint32_t handle, std::uint32_t vlkey, std::uint32_t vrkey, std::uint32_t plkey,
                        std::uint32_t prkey) {
  if (!attached()) {
    if (const int error = make_writable()) return error;
    // The two keys of an MR need not share an index (with rxe and mlx5 they do).
    __atomic_store_n(&key_table_[vlkey >> 8].lkey, plkey ^ (vlkey & 0xff), __ATOMIC_RELEASE);
    if (vrkey) __atomic_store_n(&key_table_[vrkey >> 8].rkey, prkey ^ (vrkey & 0xff), __ATOMIC_RELEASE);
    return 0;
  }
  migr_ioc_bind_mr bind{handle, vlkey, vrkey, 0};
  return ioctl(fd_, MIGR_IOC_BIND_MR, &bind) == 0 ? 0 : errno;
}

int KernelLink::query_mr(std::uint32_t handle, migr_ioc_query_mr& out) {
  if (!attached()) return ENODEV;
  out = {};
  out.handle = handle;
  return ioctl(fd_, MIGR_IOC_QUERY_MR, &out) == 0 ? 0 : errno;
}

int KernelLink::driver_resp(migr_obj_type type, std::uint32_t handle, void* buf, std::uint32_t& len) {
  if (!attached()) return ENODEV;
  migr_ioc_driver_resp resp{static_cast<std::uint32_t>(type), handle, reinterpret_cast<std::uintptr_t>(buf), len, 0};
  if (ioctl(fd_, MIGR_IOC_DRIVER_RESP, &resp) != 0) return errno;
  len = resp.len;
  return 0;
}

bool KernelLink::empty_tables() {
  // MAP_FIXED replaces in one step: at no moment can another mapping take the address. Where memory is not overcommitted, what cannot be
  // written to is not counted.
  read_only_ = true;
  return private_memory(qpn_table_, MIGR_QPN_TABLE_BYTES, PROT_READ) && private_memory(key_table_, MIGR_KEY_TABLE_BYTES, PROT_READ);
}

bool KernelLink::map_tables(int fd) {
  return table_of(fd, qpn_table_, MIGR_QPN_TABLE_BYTES, MIGR_QPN_TABLE_OFFSET) &&
         table_of(fd, key_table_, MIGR_KEY_TABLE_BYTES, MIGR_KEY_TABLE_OFFSET);
}

int KernelLink::detach() {
  if (!attached()) return 0;
  if (!empty_tables()) {
    const int error = errno;
    (void)map_tables(fd_);
    return error;
  }
  close_own(fd_);
  fd_ = -1;
  return 0;
}

int KernelLink::reattach(int uverbs_fd) {
  if (attached() || private_wanted()) return 0;
  std::uint32_t module_abi = MIGR_ABI_VERSION;
  std::uint32_t ctx_id = 0;
  const int fd = open_attached(uverbs_fd, ctx_id, module_abi);
  if (fd < 0) return -fd;
  if (!map_tables(fd)) {
    const int error = errno;
    (void)empty_tables();
    close_own(fd);
    return error;
  }
  fd_ = fd;
  ctx_id_ = ctx_id;
  return 0;
}

}  // namespace migr
