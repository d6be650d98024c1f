// SPDX-License-Identifier: Apache-2.0
#include "src/mpi/control.hpp"

#include "src/base/fixed_text.hpp"

namespace muster::mpi {

Control failure_notice(int from, int group, const Error& cause) {
  Control notice;
  notice.kind = ControlKind::failure;
  notice.from = from;
  notice.group = group;
  notice.error_kind = static_cast<std::int32_t>(cause.kind());
  notice.error_rank = cause.rank().value_or(-1);
  notice.os_error = cause.os_error();
  notice.has_pid = cause.pid() ? 1 : 0;
  notice.pid = cause.pid().value_or(0);
  put_text(notice.host, cause.host());
  put_text(notice.text, cause.what());
  return notice;
}

Error to_error(const Control& notice) {
  ErrorDetails details;
  if (notice.error_rank >= 0) details.rank = notice.error_rank;
  if (notice.has_pid != 0) details.pid = notice.pid;
  details.host = get_text(notice.host);
  details.os_error = notice.os_error;
  return Error(static_cast<ErrorKind>(notice.error_kind), get_text(notice.text), std::move(details));
}

}  // namespace muster::mpi
