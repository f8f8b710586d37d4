/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * Asynchronous events. What the application has not read when its process is frozen is read for it and kept, since the new
 * objects know nothing of it. As long as something is kept, another descriptor that is always readable stands at the number
 * of the context's, so that poll(2) says so; ibv_get_async_event() answers with what is kept.
 * What the device says of a path that libmigr has closed is no news for the application.
 */
#ifndef MIGR_EVENTS_H
#define MIGR_EVENTS_H

#include <mutex>
#include <utility>

#include "shadow.h"

namespace migr::events {

/// Reads and keeps all there is; from here to offer() the descriptor is the kernel's own. Thread: control thread.
void collect(ibv_context& ctx);
/// The descriptor shows that something is kept, if so.
void offer(ibv_context& ctx);

/// What is said of QPs from here on is not given to anybody before it is known what becomes of the process: a restore puts
/// new ones into the state that theirs had, and the device tells of it. thawed() drops that, or gives it back.
void frozen();
void thawed(bool restored);

/// The context's descriptor as the kernel has given it, whatever stands at its number. Caller holds events_lock.
int kernel_fd(const ibv_context& ctx);
/// libibverbs tells the kernel the context's descriptor with each CQ, QP, SRQ and WQ that it creates, and the kernel takes
/// none but its own (EBADF). @return what `create` returns; it creates one, and nothing else
template <class Create>
auto with_kernel_fd(ibv_context& ctx, Create&& create) {
  std::lock_guard guard(Registry::get().events_lock);
  const int shown = std::exchange(ctx.async_fd, kernel_fd(ctx));
  auto* const made = create();
  ctx.async_fd = shown;
  return made;
}

/// From now on `qp`, the path of `q`, goes to ERR because we want it: nobody is told.
void hush(QpShadow& q, const ibv_qp* qp);

/// Whether what the device says of a path is the application's business, as if that were its own.
bool is_told(const QpShadow& q, const ibv_async_event& event);
/// The application gets `event`, as it knows it, for the CQ_ERR of `bell`, which is a CQ of ours and is about to overrun: so the kernel wakes
/// whoever waits for one. If an SRQ's limit is reached it is armed no more: then the caller holds its lock.
void will_tell(const ibv_cq* bell, const ibv_async_event& event);
/// Whether that event was not taken yet.
bool rings(const ibv_cq* bell);
/// Before it is destroyed: the event comes without it.
void still(const ibv_cq* bell, ibv_context& ctx);

/// Whether all connections of this context go on without its ports: then nobody is told that one has failed, nor that it works again.
/// Programs end their connections on that.
void backed_up(const ibv_context& ctx, bool is);

/// As the kernel does it: what was not read goes with the object. @param object the application's QP, CQ or SRQ
void forget(const void* object);
/// The context is about to be closed.
void dropped(ibv_context& ctx);

}  // namespace migr::events

#endif
