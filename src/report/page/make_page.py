import sys
open(sys.argv[2],'w').write('''#include "src/report/page.hpp"
namespace muster::report { const std::string_view page_head = "<script type=\\"application/json\\" id=\\"muster-data\\">"; const std::string_view page_tail = "</script>"; }''')
