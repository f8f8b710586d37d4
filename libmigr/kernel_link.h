/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* One user context's door to migr.ko (/dev/migr): attach, tables, bindings. */
#ifndef MIGR_KERNEL_LINK_H
#define MIGR_KERNEL_LINK_H

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_set>

#include <linux/types.h>
#include <sys/mman.h>
#include "../include/uapi/migr.h"

namespace migr {

/// Memory that costs nothing until it is written. @param where null, or the address that must be taken. @return null: no room
void* private_memory(void* where, std::size_t bytes, int access = PROT_READ | PROT_WRITE);

/// Without migr.ko (or with MIGR_TABLES=private, for measurements) both tables are private memory of the process
/// that bind_*() fills: everything works within the process, nothing can be migrated. Says so once on stderr,
/// except with MIGR_TABLES=private. An ABI mismatch is said once too, with both versions.
/// Thread: any, with the Registry's lock held.
class KernelLink {
 public:
  explicit KernelLink(int uverbs_fd);
  ~KernelLink();
  KernelLink(const KernelLink&) = delete;
  KernelLink& operator=(const KernelLink&) = delete;

  /// Else there is no address space for them (ulimit -v), which was said, and the data path cannot do without.
  bool has_tables() const { return qpn_table_ && key_table_; }
  bool attached() const { return fd_ >= 0; }
  std::uint32_t ctx_id() const { return ctx_id_; }
  /// Why it never was. Empty: it was.
  const std::string& why_private() const { return why_private_; }
  /// Stay valid and at their address until destruction, across detach() and reattach().
  const std::uint32_t* qpn_table() const { return qpn_table_; }
  const migr_key_entry* key_table() const { return key_table_; }

  /// All return 0 or a positive errno.
  int bind_qp(std::uint32_t vqpn, std::uint32_t pqpn);
  /// It is what another QP is called, or is to be when it comes home: who is numbered so by the device is called otherwise.
  bool is_name_of_another(std::uint32_t pqpn) const;
  /// The record says of a QP, which is in ERR by our doing, that it is in `state` (RTR or RTS).
  int stands(std::uint32_t pqpn, std::uint32_t state);
  int bind_mr(std::uint32_t handle, std::uint32_t vlkey, std::uint32_t vrkey, std::uint32_t plkey, std::uint32_t prkey);
  int query_mr(std::uint32_t handle, migr_ioc_query_mr& out);
  /// @param len in: room at buf, bytes; out: bytes there are
  int driver_resp(migr_obj_type type, std::uint32_t handle, void* buf, std::uint32_t& len);

  /// Before a checkpoint: closes /dev/migr and puts private copies of nothing (zero pages) where the tables were, so
  /// that no mapping or descriptor of migr's is in the image. The data path must be suspended. @return an errno, and it is attached as before
  int detach();
  /// After a restore or a rollback: attaches to uverbs_fd's context and maps the tables at the same addresses.
  int reattach(int uverbs_fd);

 private:
  bool map_tables(int fd);
  bool empty_tables();
  int make_writable();

  int fd_ = -1;
  std::string why_private_;
  bool read_only_ = false;  ///< the tables, while there is no migr.ko behind them
  std::uint32_t ctx_id_ = 0;
  std::uint32_t* qpn_table_ = nullptr;
  migr_key_entry* key_table_ = nullptr;
  std::unordered_set<std::uint32_t> names_;  ///< not attached: of QPs with other numbers
};

}  // namespace migr

#endif
