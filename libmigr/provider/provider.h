/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/* What differs between NIC families, behind one interface. */
#ifndef MIGR_PROVIDER_H
#define MIGR_PROVIDER_H

#include <cstdint>
#include <span>
#include <string>
#include <vector>
#include "../shadow.h"
#include "../../include/migr/ahead.h"
#include "../../include/migr/proc_wire.h"

namespace migr::provider {

/// What can be moved. @return "" if this context's device family is supported, else why not (one line).
std::string unsupported_reason(const Context& context);

/// The same of a context that is ours: whether vQPs can have paths there.
/// @param ops the provider's own
bool is_supported(const ibv_context& real, const ibv_context_ops& ops);

/// Looks up where the queues of these QPs lie, for outstanding_receives() and sends_in_queue(): ahead of the stop, because
/// it takes a while with thousands of them. What is known already is not looked up again. @return 0 or a positive errno
int locate_queues(std::span<QpShadow* const> qps);

/// The same of SRQs. Takes the lock of each.
int locate_queues(std::span<SrqShadow* const> srqs);

/// The same of one QP that no shadow stands for, of a context of ours.
int locate_queues(KernelLink& kernel, const ibv_qp& qp, QpShadow::Ring& sends, QpShadow::Ring& receives);

/// Receives that were posted to the QP's path and not consumed, oldest first. Their keys are physical, as they lie in the
/// queue. Nothing may post to or consume from the QP meanwhile.
/// @return 0 or a positive errno
int outstanding_receives(QpShadow& shadow, std::vector<KeptReceive>& out);

/// The same of an SRQ. Caller holds its lock.
int outstanding_receives(SrqShadow& shadow, std::vector<KeptReceive>& out);

/// What posting `wr` is refused with in the state in which the application has its QP, if there is room for it, and SGEs and inline data are
/// not too many. @return 0 or a positive errno
int refusal_of(const QpShadow& shadow, const ibv_send_wr& wr);

/// Binding a window of type 1 is no more than posting a work request.
bool binds_by_work_request(const Context& context);

/// A completion, as the provider gives it, of a receive that has ended the binding of a memory window.
bool ends_binding(const ibv_wc& wc);

/// Work requests that the device has not finished: posted to the send queue and not completed. @return 0 or a positive errno
int sends_in_queue(QpShadow& shadow, unsigned& count);

/// The part of a queue between two indices of its ring.
struct QueuePart {
  std::uint32_t from = 0, to = 0;
  std::uint32_t mask = 0;
  std::uint32_t size() const { return (to - from) & mask; }
};

/// What has not been completed. A QP with an SRQ has no receives. @return 0 or a positive errno
int queue_parts(QpShadow& shadow, QueuePart& sends, QueuePart& receives);

/// What lies there, with physical keys. It stays readable when the device has consumed it, until something is posted or
/// the QP is reset.
int sends_in(QpShadow& shadow, QueuePart part, std::vector<QueuedSend>& out);
int receives_in(QpShadow& shadow, QueuePart part, std::vector<KeptReceive>& out);

/// The same of a path that is not the QP's any more, by where its queues lie.
int queue_parts(const QpShadow::Ring& send_ring, const QpShadow::Ring& receive_ring, QueuePart& sends, QueuePart& receives);
int sends_in(const QpShadow::Ring& ring, QueuePart part, std::vector<QueuedSend>& out);
int receives_in(const QpShadow::Ring& ring, QueuePart part, std::vector<KeptReceive>& out);

/// A handle that was made for another address leads to `attr` from now on, from `from` of this host. Nobody has to answer there: the
/// device asks for the way with each work request.
void lead_unresolved(ibv_ah& ah, const ibv_ah_attr& attr, const ibv_gid& from);

/// `ah` becomes what `fresh` is, which is given up: the application keeps its pointer.
void become(ibv_ah& ah, ibv_ah* fresh);

/// Finds out where the ring of a queue went that is resized in between. Caller holds the Registry's lock.
class RingWatch {
 public:
  explicit RingWatch(const Context& context);
  /// Leaves both as they are if no ring has come.
  void moved_to(std::uint64_t& offset, std::uint64_t& bytes) const;

 private:
  const Context& context_;
  std::vector<std::uint64_t> before_;  ///< mmap offsets
};

/// A child that is forked does not get the mappings of queues: it cannot use them, and each can be mapped only once when
/// the child is restored on another host. Costs a look at the process's mappings.
/// @param ops the provider's own
void keep_from_children(const ibv_context& real, const ibv_context_ops& ops);

/// The queue mappings (rings) of every object of a context: where they lie in this process, and their mmap offsets.
int rings(Context& context, std::vector<migr_fd_desc>& out);

/// Executable mappings of the provider's code, as text ranges of kind 1.
std::vector<migr_text_range> text_ranges();

/// Registers memory with a raw uverbs call (ioctl INVOKE_WRITE, which works for a restored process): no libibverbs
/// object is made. @return 0 or a positive errno
int raw_reg_mr(ibv_context* context, std::uint32_t pd_handle, const void* addr, std::uint64_t length,
               std::uint64_t iova, int access, std::uint32_t& handle, std::uint32_t& lkey, std::uint32_t& rkey);

/// The same, laid out as the argument of that ioctl, for who executes it later. `command` must stay where it is.
void prepare_reg_mr(const ibv_context* context, std::uint32_t pd_handle, const void* addr, std::uint64_t length,
                    std::uint64_t iova, int access, migr_ahead_mr& command);

}  // namespace migr::provider

#endif
