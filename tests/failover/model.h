// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// A libibverbs.so.1 with two hosts, a and b, of three NICs each (a0 a1 a2, b0 b1 b2), in one process. RC only: packets of a path's MTU
// with PSNs, go-back-N, queues in memory that the device reads. The wire between an and bn can be cut after any
// packet, in both directions or only for what comes back. What differs between devices is made to differ: keys, QP numbers, MTUs.
#ifndef MIGR_TEST_FAILOVER_MODEL_H
#define MIGR_TEST_FAILOVER_MODEL_H

#include <infiniband/verbs.h>

#include <cstdint>
#include <vector>

namespace model {

struct Send {
  ibv_send_wr wr{};
  std::vector<ibv_sge> sges;
  std::vector<std::uint8_t> inline_data;
  std::uint32_t bytes = 0, first_psn = 0;
  std::uint32_t psns = 0;      ///< that it takes from there on
  std::uint32_t answered = 0;  ///< a READ: answers that have come. It is sent again from behind those, as by soft-RoCE
  bool begun = false, given_up = false;
  std::uint64_t answer = 0;  ///< atomics: what the responder has found. With the requester once an acknowledgement gets through
};

struct Receive {
  std::uint64_t wr_id = 0;
  std::vector<ibv_sge> sges;
};

/// What lies in it stays until its slot is used again, as in memory that a device shares.
template <class T>
struct Ring {
  std::vector<T> slots;  ///< a power of two
  std::uint32_t from = 0, to = 0;
  std::uint32_t mask() const { return static_cast<std::uint32_t>(slots.size() - 1); }
  std::uint32_t size() const { return (to - from) & mask(); }
  bool full() const { return size() == mask(); }
};

struct Srq {
  ibv_srq srq{};  ///< first
  Ring<Receive> receives;
  unsigned qps = 0;
  std::uint32_t limit = 0;
};

struct Qp {
  ibv_qp qp{};  ///< first
  Ring<Send> sends;
  Ring<Receive> receives;
};

}  // namespace model

extern "C" {
/// Link 0 to 2: after so many more packets nothing gets through; `answers_only`: requests still do, what comes back does not.
void model_cut(int link, unsigned after_packets, bool answers_only);
void model_cut_now(int link);  ///< if it is not yet
void model_mend(int link);
/// On that link, whose other QPs are well: what an end's (a: 0, b: 1) with so many receives at most have in flight is given up.
/// @return how many had something
unsigned model_break_paths(int link, int end, unsigned receives);
/// This thread's next ibv_post_send() or ibv_post_recv() to a device loses its processor in the driver until model_let_post_go(), or, `until_err`, until its QP
/// has been put into ERR by ibv_modify_qp(), which returns when it has posted. That does so when `before` was called and the queue is empty.
void model_hold_post(bool until_err, void (*before)(void*), void* with);
/// What is posted to a QP in ERR is flushed when that is over, or right before the QP is reset.
void model_hold_flushes(bool hold);
bool model_holds_post();
bool model_holds_post_to_err();
void model_let_post_go();  ///< returns when it has posted
/// The next atomic that a NIC sends to itself is on its way until its responder is asked for its state, and executed right after that, if it
/// still can be.
void model_delay_atomic();
/// What a NIC sends to itself, or with `answers_only` what comes back, does not get through before it was sent again so often, as on a host that
/// does not get to it.
void model_starve_own(unsigned retries, bool answers_only);
unsigned model_own_given_up();  ///< that were, of those, since
/// When it is cut, who sends over it has no route: the send ends at once with LOC_QP_OP_ERR, and the port is down, or so long after that.
void model_take_route(int link, unsigned port_late_ms = 0);
/// An end's GID at that index ends with this byte now, 0: none is there. It begins with 2 * 3 NICs whose only one, at 0, ends with 1 (a0) to 6 (b2). What was connected
/// by a GID that is gone, or at another index now, finds no way: LOC_QP_OP_ERR. The table of all is answered from the first call on.
void model_set_gid(int link, int end, std::uint32_t index, std::uint8_t name);
/// Larger ones do not get through, until it is mended: an MTU that is too small on the way. Of a READ's answer that is not told.
void model_largest_packet(int link, std::uint32_t bytes);
/// An end (a: 0, b: 1) gets no QP there, the next `times` that it asks for one.
void model_refuse_qps(int link, int end, unsigned times);
/// An end gets no QP there whose queues are deeper.
void model_most_wrs(int link, int end, unsigned most);
/// Its next QP there has this number. @return which it would have had
std::uint32_t model_next_qpn(int link, int end, std::uint32_t next);
/// An end (a: 0, b: 1) has no such device, or has it again; what was opened before goes on.
void model_unplug(int link, int end, bool out);
/// An end's device there is of another family, or not.
void model_make_foreign(int link, int end, bool foreign);
bool model_is_foreign(const ibv_context* c);
/// Of the last ibv_cq_ex that was made.
unsigned model_cq_flags();
/// Of that end's device, in each context that is open and has asynchronous events.
void model_raise_fatal(int link, int end);
/// How often the last packet of a WRITE to this address was executed, on any link.
unsigned model_writes_at(const void* address);
void model_forget_writes();
unsigned long model_packets();
/// Who completes a session waits before what it has built is in the queue.
void model_hold_sessions(bool hold);
/// Sends that were posted while the other end had no receive for them.
unsigned long model_unready_sends();
/// That there are, on all NICs.
unsigned model_qps();
/// Who registers memory on that link, gives it back or makes an address handle waits in the driver, as while pages are pinned.
void model_hold_registrations(int link, bool hold);
unsigned model_registrations_waiting();
/// Who allocates a PD on link 0, which libmigr does with its lock, waits in the driver.
void model_hold_pds(bool hold);
unsigned model_pds_waiting();
/// This thread's next ibv_poll_cq() of a device loses its processor in the driver until model_let_poll_go().
void model_hold_poll();
bool model_holds_poll();
void model_let_poll_go();
/// Who resets a QP on link 0 waits in the driver.
void model_hold_resets(bool hold);
unsigned model_resets_waiting();
/// Who destroys a CQ of the application's on link 0 does not come back from the driver, which has given it up.
void model_hold_destroyed_cqs(bool hold);
unsigned model_destroyed_cqs_waiting();
/// Memory at this address cannot be registered on backup links: ENOMEM. Null: all can.
void model_refuse_registrations(const void* address);
/// No memory can be registered anew, as with a driver that does not implement it.
void model_refuse_reregistrations(bool refuse);
/// No CQ can be enlarged to more.
void model_most_cqes(int most);
/// The device refuses to give memory of link 0 back, the next `times` that it is asked to, as while a window is bound to it.
void model_keep_registrations(unsigned times);
/// That an end (a: 0, b: 1) has on that link.
unsigned model_mrs(int link, int end);
/// An end's device gives this index to what is registered, or made a window, next on that link.
void model_next_key(int link, int end, std::uint32_t index);
/// Memory that is registered once more in a restored process, as it is, gets another key.
void model_number_anew(bool anew);
void model_register_again(const ibv_context* c, std::uint32_t* handle, std::uint32_t* lkey, std::uint32_t* rkey);
/// How often this memory was registered at the same time, at most.
unsigned model_most_registered(const void* address);
/// A QP that has sent something over a link that is cut is destroyed when that is mended and not before, as where the network holds
/// a packet back; and who connects one, or makes an address handle, is told after a second that nobody answers.
void model_let_packets_linger(bool let);
/// Devices that are opened from now on have asynchronous events: each QP that goes to ERR says LAST_WQE_REACHED, as if it had
/// an SRQ; others are raised.
void model_async_events();
void model_raise(ibv_context* c, ibv_event_type type, int port);
/// QPs and CQs that were destroyed while as many events were not acknowledged as were read, as their kernel object counts.
unsigned model_unbalanced();
/// Memory windows that there are and that are bound, on all NICs. Binding is all that can be done with them.
unsigned model_windows();
unsigned model_windows_bound();
/// A message, at a QP of a0 that has a receive and is called there as the application calls it. That one is flushed raises no event of
/// a CQ that is armed for solicited completions, as with soft-RoCE of Linux 6.12.
void model_arrives(const ibv_qp* qp, bool solicited);
/// The same right after the next receives that are flushed.
void model_arrives_at_flush(const ibv_qp* qp, bool solicited);
/// Of QPs that were moved to ERR, since the beginning.
unsigned model_receives_flushed();
/// The kernel's objects are new ones from here on (windows are not there): they have reported nothing, but what those say that had to go to ERR, and no CQ is
/// armed. A QP is in the state that it was last put into, also where the device has broken it since.
void model_restored();
/// The lock of everything, for a test's provider.
void model_lock();
void model_unlock();
}

#endif
