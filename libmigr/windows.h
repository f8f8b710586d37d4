/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Memory windows. Only their device knows what they are bound to, so a process
 * that has one pays for being watched: its posts go the switched way and its
 * completions through the fake CQ. What was bound last is bound again on another
 * host, or to another path of the QP that a window of type 2 belongs to.
 *
 * A window is the provider's own object, not a shadow; its rkey is virtual once
 * the process has moved.
 */
#ifndef MIGR_WINDOWS_H
#define MIGR_WINDOWS_H

#include <span>
#include <string>
#include <vector>

#include "../include/migr/proc_wire.h"
#include "shadow.h"

namespace migr::windows {

/* Callers of these hold the Registry's lock. */

/// @return null with errno; EBUSY: links::may_give_up_backups()
ibv_mw* allocate(Context& context, ibv_pd* pd, ibv_mw_type type);
int deallocate(Context& context, ibv_mw* mw);
/// One of the context has a key with this index, of its own name.
bool is_name(const Context& context, std::uint32_t key);
/// A QP or CQ of a context that has windows; a QP that goes, and whose completions were taken.
void made(QpShadow& q);
void made(CqShadow& c);
void gone(const QpShadow& q);
/// A context that is closed, and all its objects with it.
void dropped(const Context& context);

/// Around a fork: the child does not have the thread that holds the lock of the data path.
void lock_for_fork();
void unlock_after_fork();

/// Those of type 2 that are bound through `q`.
std::vector<ibv_mw*> belonging_to(const QpShadow& q);

/// A work request for the provider that binds `mw` once more as it is bound, or that ends that.
struct Operation {
  ibv_mw provider;  ///< what the WR names
  ibv_send_wr wr;
};
/// @return false: it is not bound, or its memory is not registered any more
bool bind_again(ibv_mw* mw, Operation& op);
void end_binding(ibv_mw* mw, Operation& op);

/// REBIND: the windows once more, not bound.
int make_again(std::string& why);
/// Of those of a context: their names, of the application and of the device.
void keys(const Context& context, std::vector<migr_key_map>& out);
/// All that are bound, and through which QP: null if it is gone, then any of the PD will do.
std::vector<std::pair<ibv_mw*, QpShadow*>> bound();

/* Data path: calls that take a lock. */

/// The application's WR of a bind or a local invalidation becomes the provider's, and the window what it makes of it: its
/// completion may be there before the post returns. @param view stands for the window
/// @return false: it names no window; else settle() has to follow, in this thread
bool translate(QpShadow& q, ibv_send_wr& wr, ibv_mw& view) noexcept;
/// What this thread has translated for `q` was posted; or it was not, and the windows are what they were.
void settle(const QpShadow& q, bool posted) noexcept;
/// A bind or a local invalidation has completed, or something has failed: then what was not executed has changed nothing.
void completed(const Context& context, const ibv_wc& wc) noexcept;
/// A receive of a context that has ended a binding, with its physical key.
void invalidated(const Context& context, ibv_wc& wc) noexcept;

}  // namespace migr::windows

#endif
