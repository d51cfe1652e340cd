#include "libjpeg.h"

namespace headway {
namespace {

enum { kEnds = 1000, kScans };  // our own messages, beside libjpeg's
const char* const kMessages[] = {"the file ends before the image does", "there are more than %d scans"};

Guard& guard_of(j_common_ptr image) { return *static_cast<Guard*>(image->client_data); }

void fail(j_common_ptr image) { longjmp(guard_of(image).jump, 1); }

void fail_with(j_common_ptr image, int message, int number) {
  image->err->msg_code = message;
  image->err->msg_parm.i[0] = number;
  fail(image);
}

void warn(j_common_ptr image, int level) {
  if (level >= 0) return;
  ++image->err->num_warnings;
  if (guard_of(image).strict) fail(image);
}

void say_nothing(j_common_ptr) {}

// An early end is found only when libjpeg wants more than there is, so files that merely lack their end marker pass
// where Pillow lets them pass.
boolean no_more(j_decompress_ptr image) {
  fail_with(reinterpret_cast<j_common_ptr>(image), kEnds, 0);
  return FALSE;
}

void skip(j_decompress_ptr image, long count) {
  if (count <= 0) return;
  if (size_t(count) > image->src->bytes_in_buffer) no_more(image);
  image->src->next_input_byte += count;
  image->src->bytes_in_buffer -= count;
}

void nothing(j_decompress_ptr) {}

void count_scans(j_common_ptr image) {
  const Guard& guard = guard_of(image);
  const int scans = reinterpret_cast<j_decompress_ptr>(image)->input_scan_number;
  const int most = int(guard.max_scans);
  if (most && scans > most) fail_with(image, kScans, most);
}

}  // namespace

void watch(Guard& guard, jpeg_common_struct& image) {
  image.err = jpeg_std_error(&guard.errors);
  image.client_data = &guard;
  guard.errors.error_exit = fail;
  guard.errors.emit_message = warn;
  guard.errors.output_message = say_nothing;
  guard.errors.addon_message_table = kMessages;
  guard.errors.first_addon_message = kEnds;
  guard.errors.last_addon_message = kScans;
}

void read_from(Guard& guard, jpeg_decompress_struct& image, const uint8_t* data, size_t size, uint32_t max_scans) {
  guard.max_scans = max_scans;
  guard.progress.progress_monitor = count_scans;
  guard.source.next_input_byte = data;
  guard.source.bytes_in_buffer = size;
  guard.source.init_source = nothing;
  guard.source.fill_input_buffer = no_more;
  guard.source.skip_input_data = skip;
  guard.source.resync_to_restart = jpeg_resync_to_restart;
  guard.source.term_source = nothing;
  image.src = &guard.source;
  image.progress = &guard.progress;
  image.mem->max_memory_to_use = kMaxMemory;
}

bool finished(const jpeg_decompress_struct& image) {
  for (int index = 0; image.coef_bits && index < image.num_components; ++index) {
    for (int place = 0; place < 10; ++place) {
      if (image.coef_bits[index][place]) return false;
    }
  }
  return true;
}

}  // namespace headway
