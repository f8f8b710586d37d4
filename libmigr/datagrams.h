/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Unconnected QPs: address handles, and the names by which their peers know each
 * other after one of them has moved. A UD QP's address is (GID, vQPN) as of its
 * birth. migrd tells every process where such addresses are now (MOVES).
 *
 * Sending: (address handle, vQPN) becomes (another handle, physical QPN).
 * Receiving: source QPN of the completion and source address of the GRH in the
 * buffer become those of the birth. So completions of such QPs go through the
 * fake CQ, and where each datagram will begin is noted when its receive is posted,
 * at the QP or the SRQ.
 *
 * An address handle is the provider's own object, not a shadow: a vQP whose peers
 * never moved goes the direct way.
 */
#ifndef MIGR_DATAGRAMS_H
#define MIGR_DATAGRAMS_H

#include <span>
#include <string>
#include <vector>

#include "../include/migr/proc_wire.h"
#include "shadow.h"

namespace migr::datagrams {

/// Before set_moves(), without the Registry's lock: ibv_cq_ex sessions that were open at prepare() end, within a second; else it
/// fails where one is.
void settle();

/* Callers of these hold the Registry's lock. */

/// From now on UD QPs take the long way; before set_moves() no thread may be inside of the short one. @return UD QPs
unsigned prepare();
/// @param moves all there are. @return 0 or a positive errno
int set_moves(std::span<const migr_move> moves, std::string& why);
/// A provider's handle; with the Registry's lock or without. The index of the source GID is the kernel's, and a provider may ask the exported
/// ibv_query_gid() what stands there: soft-RoCE's does where the kernel does not number handles (ours do).
ibv_ah* create_ah(ibv_pd* pd, ibv_ah_attr& attr);
/// A new UD QP of `shadow`'s CQs; an old one that goes.
void made(QpShadow& shadow);
void gone(QpShadow& shadow);

/// A context that is closed, and all its objects with it.
void dropped(const Context& context);

/// Around a fork: the child does not have the thread that holds the lock of the data path.
void lock_for_fork();
void unlock_after_fork();

/// FREEZE: what the address handles' source GIDs are, and by which this host's datagrams came.
void note_gids();
/// DESCRIBE: GIDs that the context's address handles send from, one of each kind. Of a handle whose GID is gone nothing: it leads nowhere already.
std::vector<ibv_gid_entry> sources(const Context& context);
/// REBIND: the address handles and multicast groups once more. There is no way back: a handle that cannot be made leads nowhere, a group that
/// cannot be joined is left, and standard error says so.
void make_again();

/// Memory whose addresses in work requests are not the process's. shift: what to add to one.
void note_shift(const Context& context, std::uint32_t lkey, std::uint64_t shift);

/* Data path. */

/// Where `wr` goes now.
void translate(ibv_send_wr& wr) noexcept;
void translate(ibv_ah*& ah, std::uint32_t& qpn) noexcept;
/// A receive is posted. Caller holds the lock of the QP or SRQ.
void await(const Context& context, AwaitedDatagrams& at, const KeptReceive& receive);
/// It was not.
void await_not(AwaitedDatagrams& at);
/// None is posted any more.
void emptied(AwaitedDatagrams& at);
/// A completion, with its virtual QPN. Caller holds c.lock.
void name_source(CqShadow& c, ibv_wc& wc);

}  // namespace migr::datagrams

#endif
